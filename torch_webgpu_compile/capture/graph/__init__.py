"""What Dynamo traced becomes captured graphs."""
