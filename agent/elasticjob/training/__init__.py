"""What training code imports of us. Works without an agent too: then it reports to nobody, and nobody ends a round."""
