"""Execution of the effects that concern workers: start, hold, stop, freeze and watch them."""
