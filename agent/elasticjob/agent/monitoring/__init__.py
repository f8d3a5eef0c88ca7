"""Whether workers make progress, and whether this node is fit and in touch with the others."""
