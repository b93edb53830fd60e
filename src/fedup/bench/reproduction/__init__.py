"""The paper's tables and figures: which cells they need, which are there already, and one page of all of them."""
