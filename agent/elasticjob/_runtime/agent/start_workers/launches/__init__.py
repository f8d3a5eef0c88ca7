"""Launchers in a pod's command that hand their ranks over to the agent, and wait for them."""
