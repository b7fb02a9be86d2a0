"""Will it fit? Budget, plan, monitor, cleanup: everything that counts bytes."""
