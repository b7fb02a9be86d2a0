export function showNew(place) {}
