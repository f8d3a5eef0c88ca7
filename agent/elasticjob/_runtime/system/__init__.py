"""What Linux and asyncio need in many places: sockets, addresses, threads, signals. It knows nothing of jobs."""
