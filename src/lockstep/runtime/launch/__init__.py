"""Worker processes: started, watched, and replaced when one dies."""
