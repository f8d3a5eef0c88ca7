"""Parts of `plain_trainer` and `plain_lightning`: trainers in scripts that nothing is added to."""
