"""The worker processes of one pod: started, watched, stopped, kept as spares."""
