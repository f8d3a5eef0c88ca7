"""The manifest of `elasticjob run`: read, completed and checked as the API server would."""
