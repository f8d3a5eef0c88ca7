"""Memory and files that an agent shares with its workers, whose content it does not trust."""
