"""One kernel that stays on the card for all layers of a decode step of one row."""
