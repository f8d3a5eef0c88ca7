"""The connection of the command line to a cluster, in the words of the API server."""
