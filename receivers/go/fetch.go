package receiver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const (
	fetchTimeoutDefault   = 30 * time.Second
	fetchPageItems        = 100
	fetchResponseBytesMax = 256 * 1024 * 1024
	fetchProblemBytesMax  = 10_000
	// fetchWaitMax limits the time spent on Retry-After hold-offs (429) of one request.
	fetchWaitMax = 60 * time.Second
)

// LaneProgress is the progress of a lane according to its sender.
type LaneProgress struct {
	Lane string
	// Acknowledged: everything up to this sequence number was delivered or dead-lettered.
	Acknowledged int64
	// Generation rises when the lanes of the endpoint are replaced.
	Generation int64
}

// PageItem is one sequence number of a lane.
type PageItem struct {
	Sequence     int64
	DeadLettered bool
	// Request is the delivery with new signatures; nil if its event was erased, or is missing.
	Request *Request
	// Missing: the event is gone, and the sender has no record that it was erased.
	Missing bool
}

// LanePage is a page of sequence numbers of a lane, in order.
type LanePage struct {
	// KeptFrom: requested numbers below this one are no longer retained.
	KeptFrom int64
	Items    []PageItem
	// Acknowledged is as of [LaneProgress].
	Acknowledged int64
	// Next: the next page begins after this number; nil on the last page.
	Next *int64
}

// DeliverySource lists lanes and returns their deliveries: [*FetchClient], or a fake in tests.
// Its errors are [*FetchError].
type DeliverySource interface {
	Lanes(ctx context.Context) ([]LaneProgress, error)
	// Page returns the deliveries after a sequence number.
	Page(ctx context.Context, lane string, after int64) (LanePage, error)
	// Delivery returns one delivery, which may be pending, with its payload.
	Delivery(ctx context.Context, lane string, sequence int64) (PageItem, error)
}

// FetchClient is a client of the relay's listener for receivers (`outbox relay --receivers`), for
// one endpoint.  It is safe for concurrent use.
//
// It returns complete deliveries with new signatures, so that each is verified and processed like
// one that was sent; the listener need not be trusted.
type FetchClient struct {
	url string
	// name is the URL without its password, for errors.
	name string
	// authorization is a function, because printing a client must not show the token.
	authorization func() string
	timeout       time.Duration
	client        *http.Client
}

// FetchOptions are the options of [NewFetchClient]; the zero value has the defaults.
type FetchOptions struct {
	// Timeout of one request.  Default: 30 s.
	Timeout time.Duration
}

// NewFetchClient returns a client.
//
// The token is the fetch token of the endpoint, from `outbox endpoint fetch-token`.  It returns an
// error if the URL or the token is invalid; the error never contains the token.
func NewFetchClient(baseURL, token string, options FetchOptions) (*FetchClient, error) {
	parsed, err := url.Parse(baseURL)
	if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" {
		return nil, errors.New("receiver: fetch: not an http or https URL")
	}
	token = strings.TrimSpace(token)
	if !regexp.MustCompile(`\A[\x20-\x7e]+\z`).MatchString(token) {
		return nil, errors.New("receiver: fetch: invalid token; create one with outbox endpoint fetch-token")
	}
	if options.Timeout == 0 {
		options.Timeout = fetchTimeoutDefault
	}
	if options.Timeout < 0 {
		return nil, fmt.Errorf("receiver: fetch: the time-out must not be negative, as %s", options.Timeout)
	}
	return &FetchClient{
		url: strings.TrimRight(baseURL, "/"), name: parsed.Redacted(), timeout: options.Timeout,
		authorization: func() string { return "Bearer " + token },
		client: &http.Client{
			// Redirects would send the token to another host.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			// No proxy of the environment, which would receive the token.
			Transport: &http.Transport{Proxy: nil, MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second},
		},
	}, nil
}

// Lanes returns the progress of each lane of the endpoint.
func (c *FetchClient) Lanes(ctx context.Context) ([]LaneProgress, error) {
	var lanes []LaneProgress
	query := url.Values{}
	for {
		response, err := c.get(ctx, "/v1/lanes", query)
		if err != nil {
			return nil, err
		}
		items, isArray := parseArray(response["items"])
		if !isArray {
			return nil, invalidField("items")
		}
		for _, item := range items {
			progress, err := parseProgress(item)
			if err != nil {
				return nil, err
			}
			lanes = append(lanes, progress)
		}
		if isNull(response["next"]) {
			return lanes, nil
		}
		next, ok := parseString(response["next"])
		if !ok || next == query.Get("after") {
			return nil, invalidField("next")
		}
		query.Set("after", next)
	}
}

// Page returns a page of the deliveries and dead letters of a lane, after a sequence number.
func (c *FetchClient) Page(ctx context.Context, lane string, after int64) (LanePage, error) {
	query := url.Values{"after": {strconv.FormatInt(after, 10)}, "limit": {strconv.Itoa(fetchPageItems)}}
	response, err := c.get(ctx, lanePath(lane), query)
	if err != nil {
		return LanePage{}, err
	}
	var page LanePage
	items, isArray := parseArray(response["items"])
	if !isArray {
		return LanePage{}, invalidField("items")
	}
	for _, each := range items {
		object, _ := parseObject(each)
		item, err := parseItem(object)
		if err != nil {
			return LanePage{}, err
		}
		page.Items = append(page.Items, item)
	}
	var ok bool
	if page.KeptFrom, ok = parseNumber(response["kept_from"]); !ok {
		return LanePage{}, invalidField("kept_from")
	}
	if page.Acknowledged, ok = parseNumber(response["acknowledged"]); !ok {
		return LanePage{}, invalidField("acknowledged")
	}
	if !isNull(response["next"]) {
		next, ok := parseNumber(response["next"])
		if !ok || next <= after {
			return LanePage{}, invalidField("next")
		}
		page.Next = &next
	}
	return page, nil
}

// Delivery returns one delivery of a lane, which may be pending, with its payload.
func (c *FetchClient) Delivery(ctx context.Context, lane string, sequence int64) (PageItem, error) {
	response, err := c.get(ctx, lanePath(lane)+"/"+strconv.FormatInt(sequence, 10), nil)
	if err != nil {
		return PageItem{}, err
	}
	return parseItem(response)
}

func lanePath(lane string) string { return "/v1/lanes/" + url.PathEscape(lane) + "/deliveries" }

// get returns the JSON object of a response.  It waits for Retry-After of 429: with a thousand lanes
// a catch-up exceeds the rate limit of its token.
func (c *FetchClient) get(ctx context.Context, path string, query url.Values) (members, error) {
	deadline := time.Now().Add(fetchWaitMax)
	for {
		body, wait, err := c.getOnce(ctx, path, query)
		if err == nil {
			object, isObject := members(nil), false
			if checkJSON(body) == nil {
				object, isObject = parseObject(body)
			}
			if !isObject {
				return nil, cannotFetch("invalid response, not from a relay: not a JSON object")
			}
			return object, nil
		}
		if wait < 0 || time.Now().Add(wait).After(deadline) {
			return nil, err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, &FetchError{text: "the catch-up was cancelled", cause: ctx.Err()}
		}
	}
}

// getOnce sends one request.  The wait is negative, or the hold-off before a further try.
func (c *FetchClient) getOnce(ctx context.Context, path string, query url.Values) ([]byte, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	unreachable := func(err error) ([]byte, time.Duration, error) {
		var ofURL *url.Error
		if errors.As(err, &ofURL) {
			err = ofURL.Err
		}
		return nil, -1, &FetchError{
			text:  oneLine(fmt.Sprintf("the relay at %s cannot be reached: %v", c.name, err)),
			cause: err,
		}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+path+"?"+query.Encode(), nil)
	if err != nil {
		return unreachable(err)
	}
	request.Header.Set("Authorization", c.authorization())
	request.Header.Set("Accept", "application/json")
	response, err := c.client.Do(request)
	if err != nil {
		return unreachable(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, retryAfter(response), cannotFetch("the relay at %s responded: %s", c.name, problemOf(response))
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, fetchResponseBytesMax+1))
	if err != nil {
		return unreachable(err)
	}
	if len(body) > fetchResponseBytesMax {
		return nil, -1, cannotFetch("the relay at %s responded with more than %d bytes", c.name, fetchResponseBytesMax)
	}
	return body, -1, nil
}

var secondsText = regexp.MustCompile(`\A[0-9]{1,6}\z`)

// retryAfter returns the hold-off of a 429; negative for other responses.
func retryAfter(response *http.Response) time.Duration {
	text := response.Header.Get("Retry-After")
	if response.StatusCode != http.StatusTooManyRequests || !secondsText.MatchString(text) {
		return -1
	}
	seconds, _ := strconv.Atoi(text)
	return time.Duration(seconds) * time.Second
}

func problemOf(response *http.Response) string {
	status := strconv.Itoa(response.StatusCode)
	body, err := io.ReadAll(io.LimitReader(response.Body, fetchProblemBytesMax))
	if err != nil || checkJSON(body) != nil {
		return status
	}
	object, _ := parseObject(body)
	if detail, ok := parseString(object["detail"]); ok {
		return status + ", " + oneLine(detail)
	}
	return status
}

func invalidField(name string) error {
	return cannotFetch("invalid response, not from a relay: the field %q is absent or has a wrong type", name)
}

func isNull(value json.RawMessage) bool { return value == nil || string(value) == "null" }

func parseProgress(item json.RawMessage) (LaneProgress, error) {
	var progress LaneProgress
	var ok bool
	object, _ := parseObject(item)
	if progress.Lane, ok = parseString(object["lane"]); !ok {
		return progress, invalidField("lane")
	}
	if progress.Acknowledged, ok = parseNumber(object["acknowledged"]); !ok {
		return progress, invalidField("acknowledged")
	}
	if progress.Generation, ok = parseNumber(object["generation"]); !ok {
		return progress, invalidField("generation")
	}
	return progress, nil
}

func parseItem(item members) (PageItem, error) {
	sequence, ok := parseNumber(item["sequence"])
	if !ok {
		return PageItem{}, invalidField("sequence")
	}
	parsed := PageItem{Sequence: sequence, DeadLettered: item.has("dead_lettered"), Missing: item.has("missing")}
	if !item.has("headers") && !item.has("body") && !item.has("body_base64") {
		return parsed, nil
	}
	headers, isObject := parseObject(item["headers"])
	if !isObject {
		return PageItem{}, invalidField("headers")
	}
	request := &Request{Method: http.MethodPost, Header: http.Header{}}
	for name, value := range headers {
		text, ok := parseString(value)
		if !ok {
			return PageItem{}, invalidField("headers")
		}
		request.Header.Add(name, text)
	}
	text, hasText := parseString(item["body"])
	encoded, hasEncoded := parseString(item["body_base64"])
	switch {
	case hasText:
		request.Body = []byte(text)
	case hasEncoded:
		body, err := decodeBase64(encoded)
		if err != nil {
			return PageItem{}, cannotFetch(`invalid response, not from a relay: the field "body_base64" is not Base64`)
		}
		request.Body = body
	default:
		return PageItem{}, invalidField("body")
	}
	parsed.Request = request
	return parsed, nil
}
