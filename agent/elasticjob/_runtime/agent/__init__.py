"""The agent of one pod: it joins the rendezvous, starts, watches and stops workers, and reports. Stdlib only."""
