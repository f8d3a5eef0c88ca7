"""`elasticjob submit`: `submit` reads the flags, `creation` and `code_update` write, `follow` shows the job."""
