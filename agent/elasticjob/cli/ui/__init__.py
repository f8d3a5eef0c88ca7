"""`elasticjob ui`: jobs on a page that this process serves on loopback. `feed` reads the cluster, `server` answers."""
