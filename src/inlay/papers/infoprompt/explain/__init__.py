"""What InfoPrompt's figures 1 and 2 measure, as commands of `inlay explain`."""
