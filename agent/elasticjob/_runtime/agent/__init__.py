"""The agent of one node: it joins the rendezvous, starts, watches and stops workers, and reports. Stdlib only."""
