"""Files in and out: workloads, budgets, profiles, journals, and what models are read from."""
