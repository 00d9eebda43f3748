package browser_test

import (
	"net/url"
	"testing"
)

func TestPictures(t *testing.T) {
	pool := newWorld(t)
	for name, l := range map[string]look{"": desktop, "-dark": {width: 1240, height: 900, dark: true}, "-360": {width: 360, height: 780}} {
		p := open(t, pool, "ann", l)
		for shot, path := range map[string]string{
			"limit-form": "limit?name=sendMessage&q=user-1",
			"limits":     "", "limit": "limit?name=signUps", "limit-day": "limit?name=sendMessage&span=day", "key": "key?name=signUps&key=acme",
			"key-window": "key?name=exportReport&key=acme", "key-blocked": "key?name=failedLogins&key=" + url.QueryEscape("mallory@example.org"), "key-plans": "key?name=sendMessage&key=user-17",
		} {
			p.see(path)
			p.fits()
			p.picture(shot + name)
		}
		p.quiet()
	}
}
