package receiver

import "container/list"

// orderedMap is a map that knows which key was set least recently.
type orderedMap[K comparable, V any] struct {
	elements map[K]*list.Element
	order    *list.List
}

type mapEntry[K comparable, V any] struct {
	key   K
	value V
}

func newOrderedMap[K comparable, V any]() *orderedMap[K, V] {
	return &orderedMap[K, V]{elements: map[K]*list.Element{}, order: list.New()}
}

func (m *orderedMap[K, V]) len() int { return m.order.Len() }

func (m *orderedMap[K, V]) get(key K) (value V, found bool) {
	element, found := m.elements[key]
	if !found {
		return value, false
	}
	return element.Value.(mapEntry[K, V]).value, true
}

// set sets a key and makes it the last one.
func (m *orderedMap[K, V]) set(key K, value V) {
	m.remove(key)
	m.elements[key] = m.order.PushBack(mapEntry[K, V]{key, value})
}

func (m *orderedMap[K, V]) remove(key K) {
	if element, found := m.elements[key]; found {
		m.order.Remove(element)
		delete(m.elements, key)
	}
}

// first returns the key that was set least recently.
func (m *orderedMap[K, V]) first() (key K, value V, found bool) {
	element := m.order.Front()
	if element == nil {
		return key, value, false
	}
	entry := element.Value.(mapEntry[K, V])
	return entry.key, entry.value, true
}

func (m *orderedMap[K, V]) each(visit func(key K, value V)) {
	for element := m.order.Front(); element != nil; element = element.Next() {
		entry := element.Value.(mapEntry[K, V])
		visit(entry.key, entry.value)
	}
}
