"""The two images, built without Docker: Debian roots by mmdebstrap, put together as OCI archives by hand."""
