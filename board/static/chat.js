export function showChat(place) {}
