"""The continual loop of a product at work: its folder, its journal, and the work of each stage."""
