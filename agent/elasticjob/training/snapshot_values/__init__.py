"""State as bytes: blocks of memory that hold it, files of them, and what its parts are written as."""
