"""From a recipe to its programs: recipe -> model -> graph -> shardings -> Program, for all verbs alike."""
