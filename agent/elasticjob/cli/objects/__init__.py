"""What all verbs know of a job and its pods, and how they wait for a job."""
