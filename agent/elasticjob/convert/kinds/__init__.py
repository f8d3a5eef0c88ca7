"""One module for each kind of job that is converted. Pure."""
