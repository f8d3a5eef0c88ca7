"""Control links to the jobs' stores."""
