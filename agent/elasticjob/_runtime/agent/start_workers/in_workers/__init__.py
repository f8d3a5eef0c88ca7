"""A folder for PYTHONPATH of workers: `sitecustomize` says what each Python below a worker gets at its start.

The modules import nothing of elasticjob: a user's program may have a package of that name.
"""
