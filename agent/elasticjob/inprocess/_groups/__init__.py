"""Process groups: break their collectives when a round or iteration ends early, and leave them."""
