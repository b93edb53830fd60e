"""What is read of a model: cuts, views that share its weights, features and their layout."""
