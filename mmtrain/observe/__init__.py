"""What a job measures of itself and shows: metrics, timelines, memory."""
