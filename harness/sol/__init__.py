"""Speed of light, counted: Nsight Compute's counters against the roofline that the ledger predicts."""
