"""What `submit` ships: the archive of the code, and the objects of a job."""
