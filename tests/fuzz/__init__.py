"""`make fuzz`: changed inputs for everything that reads what others write."""
