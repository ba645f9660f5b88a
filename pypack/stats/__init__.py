"""What is counted, and the file that it is written to."""
