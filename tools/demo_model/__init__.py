"""The parts of the recipe that makes kvplan's demo model; run through `tools/make_demo_model.py`."""
