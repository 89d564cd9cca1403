"""What rms_norm and layer_norm launch on GPUs: rows are normalised with the mean taken off, or not."""
