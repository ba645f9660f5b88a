"""Stock against the pack: runs, results, report, charts, the model of a step."""
