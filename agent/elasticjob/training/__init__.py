"""The API for training code. Without an agent its functions report nothing, and no round ends on plan."""
