"""The monitor process that `Wrapper` starts for each rank, and how it counts ranks as lost."""
