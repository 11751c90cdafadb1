package receiver

// envelopeOfEvent returns the members of an envelope, from a CloudEvent of a relay in structured
// mode.  Its numbers are texts, because an Integer of CloudEvents has 32 bits.
func envelopeOfEvent(event members) (members, error) {
	if version, _ := parseString(event["specversion"]); version != "1.0" {
		return nil, badMessage(`the body's "specversion" is not "1.0"`)
	}
	envelope := members{}
	for member, attribute := range map[string]string{
		"id": "eventid", "type": "type", "timestamp": "time", "lane": "lane",
	} {
		if value, found := event[attribute]; found {
			envelope[member] = value
		}
	}
	for member, attribute := range map[string]string{
		"sequence": "lanesequence", "previous_sequence": "previoussequence",
	} {
		if err := envelope.setNumberOf(member, event, attribute); err != nil {
			return nil, err
		}
	}
	if encoded, found := event["data_base64"]; found {
		envelope["data_base64"] = encoded
		envelope["content_type"] = event["datacontenttype"]
	} else if data, found := event["data"]; found {
		envelope["data"] = data
	} else {
		// An event without data has no payload, which is null.
		envelope["data"] = []byte("null")
	}
	for _, each := range []struct{ member, plain, encoded string }{
		{"key", "subject", "encodedkey"},
		{"tenant", "tenant", "encodedtenant"},
	} {
		if value, found := event[each.plain]; found {
			envelope[each.member] = value
		} else if _, found := event[each.encoded]; found {
			text, err := event.text(each.encoded)
			if err != nil {
				return nil, err
			}
			if err := envelope.setDecoded(each.member, text, each.encoded); err != nil {
				return nil, err
			}
		}
	}
	return envelope, addEventOptions(envelope, event)
}

func addEventOptions(envelope, event members) error {
	if _, found := event["replayof"]; found {
		text, err := event.text("replayof")
		if err != nil {
			return err
		}
		if err := envelope.setReplay(text); err != nil {
			return err
		}
	}
	if _, found := event["backfill"]; found {
		if err := envelope.setNumberOf("backfill", event, "backfill"); err != nil {
			return err
		}
	}
	if ends, found := event["laneends"]; found {
		envelope["lane_ends"] = ends
	}
	return nil
}

// setNumberOf adds a number that an event has as text.
func (m members) setNumberOf(member string, event members, attribute string) error {
	text, err := event.text(attribute)
	if err != nil {
		return err
	}
	number, ok := parseDecimal(text)
	if !ok {
		return badMessage("the body's %q is not a number", attribute)
	}
	m.setNumber(member, number)
	return nil
}
