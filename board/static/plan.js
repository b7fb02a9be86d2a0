export function showPlan(place) {}
