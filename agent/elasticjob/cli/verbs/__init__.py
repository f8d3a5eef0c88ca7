"""What each verb of the command line does: a file for each verb, or a folder with a file of that name and its parts."""
