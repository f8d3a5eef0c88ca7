"""Work of other threads on the main thread: raise an exception there, watch it, and limit its waits."""
