"""Build the two images without Docker: Debian roots by mmdebstrap, written as OCI archives."""
