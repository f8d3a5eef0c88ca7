"""The stores of `Wrapper`: what ranks share in one, its clients, its server, and how it notices a lost rank."""
