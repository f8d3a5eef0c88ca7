"""Rounds: who trains together, decided in one place.

`state` holds what the coordinator knows, `rounds` decides (pure), `ranks` hands out ranks (pure), `view` tells the
operator (pure), `coordinator` carries it over control links, `node` is a node's side.
"""
