"""Setting a run up, the loop, and what a user asks of the model beside it."""
