"""`elasticjob why`: `why` reads the `circumstances` of a job; `causes` and `pod_problems` decide, and are pure."""
