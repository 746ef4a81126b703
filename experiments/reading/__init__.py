"""What results say: result files, curves, tables, comparisons, findings in words."""
