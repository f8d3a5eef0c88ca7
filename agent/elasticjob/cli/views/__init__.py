"""What the verbs found, as text for a person or as JSON and YAML for a program."""
